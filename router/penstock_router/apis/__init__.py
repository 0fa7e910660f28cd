"""The APIs that clients use. Each is translated to one request type and back, without HTTP."""
