"""The wrapped object: wrappers, what they put on a model, and how it predicts, copies, saves and loads. It knows no method by name."""
