"""A process beside the router that does one task at a time: both ends of its socket."""
