"""What several test files share: models, tables and comparisons."""
