"""Makes a runner that is ready to serve from --model."""
