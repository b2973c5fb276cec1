"""Jobs, pictures, cases and predictions, for all widgets."""
