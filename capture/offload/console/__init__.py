"""Text for and from users: amounts, progress, safe text, and the user's line."""
