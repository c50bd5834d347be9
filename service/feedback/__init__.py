"""What users say of answers: one row per scored prompt, their labels, kept in SQLite or PostgreSQL."""
