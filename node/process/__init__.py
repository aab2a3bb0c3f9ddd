"""Child processes of a node: started without orphans, asked by numbered frames, watched, killed, explained."""
