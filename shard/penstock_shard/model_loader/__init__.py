"""From --model to a runner that is ready."""
