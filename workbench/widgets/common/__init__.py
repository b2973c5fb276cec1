"""Parts shared by all widgets: inputs, jobs, cases, positions, predictions, pictures, and the output of saved notebooks."""
