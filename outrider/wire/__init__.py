"""Proto and domain objects, converted in one place; everything that comes in is checked."""
