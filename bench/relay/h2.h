/* As much of HTTP/2 and of gRPC's framing as both ends of a measurement need. */
#ifndef H2_H
#define H2_H

#include "common.h"

#define PREFACE "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
#define PREFACE_LENGTH 24
#define FRAME_HEAD 9
#define FRAME_MOST 16384
#define DEFAULT_WINDOW 65535
#define MESSAGE_HEAD 5

enum frame_type {
  DATA = 0, HEADERS = 1, RST_STREAM = 3, SETTINGS = 4, PING = 6, GOAWAY = 7, WINDOW_UPDATE = 8,
};
enum frame_flag { END_STREAM = 1, ACK = 1, END_HEADERS = 4, PADDED = 8 };
enum setting {
  HEADER_TABLE_SIZE = 1, MAX_CONCURRENT_STREAMS = 3, INITIAL_WINDOW_SIZE = 4,
};

static inline uint32_t read_u32(const uint8_t *at) {
  return (uint32_t)at[0] << 24 | (uint32_t)at[1] << 16 | (uint32_t)at[2] << 8 | at[3];
}

static inline void write_u32(uint8_t *at, uint32_t value) {
  at[0] = (uint8_t)(value >> 24);
  at[1] = (uint8_t)(value >> 16);
  at[2] = (uint8_t)(value >> 8);
  at[3] = (uint8_t)value;
}

struct frame {
  uint32_t length, stream;
  uint8_t type, flags;
  const uint8_t *payload;
};

/* Takes the next whole frame out of `in`; false when there is none yet. Its payload lies in `in`
 * and is valid until more is received. */
static inline bool next_frame(struct bytes *in, struct frame *frame) {
  const uint8_t *at = in->data + in->start;
  if (bytes_length(in) < FRAME_HEAD) return false;
  uint32_t length = (uint32_t)at[0] << 16 | (uint32_t)at[1] << 8 | at[2];
  if (length > FRAME_MOST) die("a frame of %u bytes", length);
  if (bytes_length(in) < FRAME_HEAD + length) return false;
  frame->length = length;
  frame->type = at[3];
  frame->flags = at[4];
  frame->stream = read_u32(at + 5) & 0x7fffffff;
  frame->payload = at + FRAME_HEAD;
  if (frame->type == DATA && frame->flags & PADDED) die("padded data is not understood");
  in->start += FRAME_HEAD + length;
  return true;
}

static inline void put_frame_head(struct bytes *out, size_t length, uint8_t type, uint8_t flags,
                                  uint32_t stream) {
  uint8_t *at = bytes_reserve(out, FRAME_HEAD);
  write_u32(at, (uint32_t)length << 8 | type);
  at[4] = flags;
  write_u32(at + 5, stream);
  out->end += FRAME_HEAD;
}

static inline void put_setting(struct bytes *out, uint16_t setting, uint32_t value) {
  uint8_t *at = bytes_reserve(out, 6);
  at[0] = (uint8_t)(setting >> 8);
  at[1] = (uint8_t)setting;
  write_u32(at + 2, value);
  out->end += 6;
}

static inline void put_window_update(struct bytes *out, uint32_t stream, uint32_t count) {
  put_frame_head(out, 4, WINDOW_UPDATE, 0, stream);
  write_u32(bytes_reserve(out, 4), count);
  out->end += 4;
}

/* Answers a PING or acknowledges SETTINGS. */
static inline void put_ack(struct bytes *out, const struct frame *frame) {
  size_t length = frame->type == PING ? frame->length : 0;
  put_frame_head(out, length, frame->type, ACK, 0);
  bytes_put(out, frame->payload, length);
}

/* ---- Header blocks -----------------------------------------------------------------------------
 *
 * Written as gRPC's own libraries do: a field goes into the peer's dynamic table when it is sent
 * for the first time, and by its index from then on; literally every time where the peer has no
 * table. Nothing here decodes header blocks.
 */

#define FIELDS_MOST 16

struct field {
  unsigned static_name; /* Index of the name in the static table, or 0. */
  const char *name;
  const char *value;
  unsigned static_field; /* Index of the whole field in the static table, or 0. */
};

struct header_table {
  bool announced; /* Whether the peer was told that its table is not used. */
  bool absent;    /* Whether the peer keeps none. */
  unsigned inserted;
  unsigned when[FIELDS_MOST]; /* 1-based insertion by field; 0: not in the table. */
};

static inline void put_integer(struct bytes *out, uint8_t pattern, unsigned prefix_bits,
                               uint32_t value) {
  uint8_t *at = bytes_reserve(out, 6);
  uint32_t most = (1u << prefix_bits) - 1;
  size_t count = 0;
  if (value < most) {
    at[count++] = (uint8_t)(pattern | value);
  } else {
    at[count++] = (uint8_t)(pattern | most);
    for (value -= most; value >= 128; value >>= 7) at[count++] = (uint8_t)(value | 128);
    at[count++] = (uint8_t)value;
  }
  out->end += count;
}

static inline void put_string(struct bytes *out, const char *text) {
  put_integer(out, 0, 7, (uint32_t)strlen(text));
  bytes_text(out, text);
}

/* Writes HEADERS. `first` numbers the first field among all fields the connection ever sends. */
static inline void put_headers(struct bytes *out, struct header_table *table,
                               const struct field *fields, unsigned count, unsigned first,
                               uint8_t flags, uint32_t stream) {
  size_t head = bytes_length(out);
  put_frame_head(out, 0, HEADERS, flags | END_HEADERS, stream);
  if (table->absent && !table->announced) put_integer(out, 0x20, 5, 0);
  table->announced = true;
  for (unsigned i = 0; i < count; i++) {
    const struct field *field = &fields[i];
    unsigned *when = &table->when[first + i];
    if (field->static_field) {
      put_integer(out, 0x80, 7, field->static_field);
    } else if (*when) {
      put_integer(out, 0x80, 7, 62 + table->inserted - *when);
    } else {
      if (table->absent) {
        put_integer(out, 0x00, 4, field->static_name);
      } else {
        put_integer(out, 0x40, 6, field->static_name);
        *when = ++table->inserted;
      }
      if (!field->static_name) put_string(out, field->name);
      put_string(out, field->value);
    }
  }
  uint8_t *at = out->data + out->start + head;
  size_t length = bytes_length(out) - head - FRAME_HEAD;
  write_u32(at, (uint32_t)length << 8 | HEADERS);
}

/* ---- Protocol buffers --------------------------------------------------------------------------- */

static inline size_t write_varint(uint8_t *at, uint64_t value) {
  size_t count = 0;
  for (; value >= 128; value >>= 7) at[count++] = (uint8_t)(value | 128);
  at[count++] = (uint8_t)value;
  return count;
}

/* Reads a varint and moves `*at`; false when there is no whole one before `end`. */
static inline bool read_varint(const uint8_t **at, const uint8_t *end, uint64_t *value) {
  *value = 0;
  for (unsigned shift = 0; shift < 64 && *at < end; shift += 7) {
    uint8_t byte = *(*at)++;
    *value |= (uint64_t)(byte & 127) << shift;
    if (byte < 128) return true;
  }
  return false;
}

/* Writes the tag and length of a field of bytes. */
static inline size_t write_length(uint8_t *at, unsigned field, size_t length) {
  at[0] = (uint8_t)(field << 3 | 2);
  return 1 + write_varint(at + 1, length);
}

static inline size_t write_bytes(uint8_t *at, unsigned field, const void *data, size_t length) {
  size_t head = write_length(at, field, length);
  memcpy(at + head, data, length);
  return head + length;
}

struct proto_field {
  unsigned number, wire_type;
  const uint8_t *data; /* Of a field of bytes. */
  uint64_t value;      /* Of a varint; of a field of bytes, its length. */
};

/* Reads the next field of a message and moves `*at`; false at its end or when it is malformed. */
static inline bool next_field(const uint8_t **at, const uint8_t *end, struct proto_field *field) {
  uint64_t tag;
  if (*at >= end || !read_varint(at, end, &tag)) return false;
  field->number = (unsigned)(tag >> 3);
  field->wire_type = tag & 7;
  field->value = 0;
  field->data = NULL;
  switch (field->wire_type) {
    case 0:
      return read_varint(at, end, &field->value);
    case 1:
    case 5: {
      size_t width = field->wire_type == 1 ? 8 : 4;
      if ((size_t)(end - *at) < width) return false;
      *at += width;
      return true;
    }
    case 2:
      if (!read_varint(at, end, &field->value) || field->value > (uint64_t)(end - *at))
        return false;
      field->data = *at;
      *at += field->value;
      return true;
    default:
      return false;
  }
}

#endif
