"""`keepwarm kv`: tools for the folder of a disk tier."""
