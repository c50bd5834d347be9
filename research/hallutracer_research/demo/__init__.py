"""How the demo model is made, and what it shows."""
