"""The page of `declutr report RUN ...`: what runs did, from the files in their folders."""
