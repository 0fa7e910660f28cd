"""Regular expressions of JSON Schema: in the dialect of llguidance, and as sets of texts."""
