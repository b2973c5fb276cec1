"""What all widgets share: inputs, jobs, cases and positions, predictions, pictures, and the output of saved notebooks."""
