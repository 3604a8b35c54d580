"""Cases of overtone.linalg."""
