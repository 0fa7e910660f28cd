"""The OpenAPI document of the routes."""
