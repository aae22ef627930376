"""What people read and write: amounts, progress, safe text, and which line is the user's."""
