"""The built-in knobs, by theme."""
