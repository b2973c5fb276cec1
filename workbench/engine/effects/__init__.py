"""What a pass does beside its output: attributes, objects, buffers and random draws, each kept right over all branches."""
