"""Expresses each keyword that llguidance lacks, or handles in part, by others."""
