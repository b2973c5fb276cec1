"""Ways to run the branches of a call: one class of executor a file, from fast to universal."""
