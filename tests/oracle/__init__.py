"""What the right answers are, in float64 numpy, written apart from the library and importing nothing of it."""
