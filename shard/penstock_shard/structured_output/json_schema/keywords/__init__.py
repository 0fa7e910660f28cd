"""What each keyword that llguidance lacks, or handles in part, is expressed by."""
