"""Workers as processes: how they start, meet, watch each other and end."""
