"""The one reader of user code: bytecode, source lines, and walks over objects. It stands above `errors` only."""
