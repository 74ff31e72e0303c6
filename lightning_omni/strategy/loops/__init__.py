"""Lightning's loops over leased data: the driver of epochs, their limits, progress, schedulers and validations."""
