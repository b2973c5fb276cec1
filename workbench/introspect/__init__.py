"""Read the user's code: which tensors it reaches, what it holds unregistered, and where a line lies."""
