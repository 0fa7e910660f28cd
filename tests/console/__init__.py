"""Tests of the console in a browser. A package, so that the browser ends with them."""
