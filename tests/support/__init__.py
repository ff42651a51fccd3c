"""What several tests need: peers in processes of their own, and a look at what this process holds."""
