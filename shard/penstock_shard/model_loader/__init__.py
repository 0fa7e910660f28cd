"""Makes a runner, ready to serve, from the model that --model names."""
