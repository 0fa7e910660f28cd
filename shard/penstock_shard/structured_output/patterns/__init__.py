"""Regular expressions of JSON Schema, in llguidance's dialect and as sets of texts."""
