"""Items that encoders read: decoded, checked, handed on between the ranks of a lane."""
