"""The data of a rank: loaders of leased samples, and the split of a batch by speed."""
