"""Reading of user code: bytecode, source lines, and walks over objects. Imports only `errors` from this package."""
