"""Text work off the event loop: in threads, or in processes of its own."""
