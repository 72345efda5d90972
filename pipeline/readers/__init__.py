"""From a path to documents: iterators inside iterators. Bad data never stops one of them; it gives a failure record.

    planning.file_parts     corpus     -> Part     a stretch of a file, about a unit of text
      inputs.find_inputs    path       -> Input    a file with its size; hub_inputs: those of a dataset
      planning._cut_file    Input      -> Part     by the head of the file, or its directory
    files.read_part         Part       -> Records  every document and failure, in order
      streams.open_input    path       -> bytes    of this machine, a store or another host
      streams.stream_of     bytes      -> ByteStream       with a position; an error is raised again
      files.read_stream     ByteStream -> Records  of a whole file: again for what is inside
        streams.decompressed  ByteStream -> ByteStream     gz, xz, zst, bz2, with a bounded length
        archives.members      ByteStream -> Member         each with a ByteStream of its own
        files.READERS[format] Body       -> Records        ByteStream, name, rules
          lines               a text or a JSON object a line, a text a file
          tables              Parquet, Arrow, CSV, TSV; rows: from the values of a row to its record
          blobs               an image or clip a file, with labels; html, docx and pdf files

All data are streams with bounded memory: nothing is extracted to disk, and sizes in headers are not trusted.
"""
