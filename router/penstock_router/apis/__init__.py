"""The APIs that clients speak: each a translation to one request type and back. None knows HTTP."""
