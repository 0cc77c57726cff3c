"""Training of the small models that ship with this repository."""
