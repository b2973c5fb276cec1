"""`Explorer`: look into one trained model, case by case."""
