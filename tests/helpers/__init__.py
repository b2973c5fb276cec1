"""Models, tables and comparisons shared by several test files."""
