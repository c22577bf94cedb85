"""One exec from arrival to commit, and how many run at once."""
