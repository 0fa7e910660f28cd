"""Text work off the event loop: in threads or text processes."""
