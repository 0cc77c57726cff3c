"""A small text-to-image model of coloured shapes: its pictures, its training and its check."""
