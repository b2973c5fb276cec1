"""`Explorer`: explore trained models case by case."""
