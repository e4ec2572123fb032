"""Which shipped layouts fit given arrays, and how to bind them."""
