"""JSON Schema -> the part of it that llguidance handles right."""
