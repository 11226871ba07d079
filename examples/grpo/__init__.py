"""The reference job: GRPO on a small real model, its weights refitted into a real engine after every step."""
