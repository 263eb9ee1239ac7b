"""Word, Excel and PowerPoint files, and what all ZIP archives of XML need."""
