"""What the widgets share: jobs, pictures, cases, and what a model says about rows."""
