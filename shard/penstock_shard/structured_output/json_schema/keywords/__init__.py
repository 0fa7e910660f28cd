"""Rewrites keywords that llguidance lacks, or supports only in part, as other keywords."""
