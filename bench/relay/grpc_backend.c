/* A back end that speaks gRPC and costs little: as many replicas as it is given ports.
 *
 *   grpc_backend [table=0] listen=PORT[,REPLICA[,FILE]]...
 *
 * It answers `Generate` and `CallOpenAI` of forebay.inference.v1 at the pace that the prompt asks
 * for, one message per token, one DATA frame per message, and all that is due in one write per
 * connection. `WatchReplica` is answered with the one message in FILE, and stays open. Which method
 * is called is read from the message, whose beginning differs, so that no header block is decoded.
 * `table` is the size of the header table it offers its clients: 0 or 4096 bytes.
 */
#include "h2.h"
#include "openai.h"
#include "pacing.h"

#define BUCKETS 256
#define RECEIVE_MOST 65536
#define STREAM_WINDOW (1u << 20)
#define CONNECTION_WINDOW (64u << 20)

struct listener {
  int fd;
  const char *replica;
  struct bytes watch; /* The serialized WatchReplicaResponse; may be empty. */
};

enum method { GENERATE, OPENAI_STREAM, OPENAI_WHOLE, WATCH };

struct stream {
  struct paced paced;
  uint32_t id;
  struct connection *connection;
  struct stream *next;
  struct bytes request;
  enum method method;
  struct pace pace;
  unsigned sent;
  int64_t window;
  struct bytes pending; /* What flow control does not let through yet. */
  bool ending;
};

struct connection {
  int fd;
  const struct listener *listener;
  struct bytes in, out;
  struct stream *streams[BUCKETS];
  struct header_table table;
  int64_t window, stream_window;
  uint32_t unacknowledged;
  unsigned blocked; /* Streams with something pending. */
  bool greeted, writing, dirty, broken;
  struct connection *next_dirty;
};

static int poller;
static struct heap due;
static struct connection *dirty;
static uint32_t table_bytes;

static const struct field ANSWER[] = {
    {.static_field = 8}, /* :status 200 */
    {31, "content-type", "application/grpc", 0},
};

static void touch(struct connection *connection) {
  if (connection->dirty) return;
  connection->dirty = true;
  connection->next_dirty = dirty;
  dirty = connection;
}

static struct stream **find(struct connection *connection, uint32_t id) {
  struct stream **at = &connection->streams[(id >> 1) % BUCKETS];
  while (*at != NULL && (*at)->id != id) at = &(*at)->next;
  return at;
}

static void drop(struct stream **at) {
  struct stream *stream = *at;
  *at = stream->next;
  if (bytes_length(&stream->pending)) stream->connection->blocked--;
  heap_remove(&due, &stream->paced);
  bytes_free(&stream->request);
  bytes_free(&stream->pending);
  free(stream);
}

static void put_trailers(struct stream *stream) {
  struct connection *connection = stream->connection;
  const struct field trailers[] = {
      {0, "grpc-status", "0", 0},
      {0, "forebay-usage", "250,64,0", 0},
      {0, "forebay-replica", connection->listener->replica, 0},
  };
  put_headers(&connection->out, &connection->table, trailers, 3, 2, END_STREAM, stream->id);
  touch(connection);
  drop(find(connection, stream->id));
}

/* Sends as much of what is pending as the windows allow. May end the stream. */
static void go_on(struct stream *stream) {
  struct connection *connection = stream->connection;
  while (bytes_length(&stream->pending)) {
    int64_t most = connection->window < stream->window ? connection->window : stream->window;
    if (most <= 0) return;
    size_t count = bytes_length(&stream->pending);
    if (count > (size_t)most) count = (size_t)most;
    if (count > FRAME_MOST) count = FRAME_MOST;
    put_frame_head(&connection->out, count, DATA, 0, stream->id);
    bytes_put(&connection->out, stream->pending.data + stream->pending.start, count);
    stream->pending.start += count;
    connection->window -= (int64_t)count;
    stream->window -= (int64_t)count;
    touch(connection);
  }
  connection->blocked--;
  if (stream->ending) put_trailers(stream);
}

/* Sends one message in a frame of its own, or keeps it until the windows open. */
static void send_message(struct stream *stream, const uint8_t *message, size_t length) {
  struct connection *connection = stream->connection;
  size_t count = MESSAGE_HEAD + length;
  int64_t needed = (int64_t)count;
  bool waits = bytes_length(&stream->pending) > 0;
  bool fits = !waits && count <= FRAME_MOST && needed <= connection->window &&
              needed <= stream->window;
  struct bytes *out = fits ? &connection->out : &stream->pending;
  if (fits) {
    put_frame_head(out, count, DATA, 0, stream->id);
    connection->window -= needed;
    stream->window -= needed;
    touch(connection);
  }
  uint8_t *head = bytes_reserve(out, count);
  head[0] = 0;
  write_u32(head + 1, (uint32_t)length);
  memcpy(head + MESSAGE_HEAD, message, length);
  out->end += count;
  if (fits) return;
  if (!waits) connection->blocked++;
  if (connection->window > 0 && stream->window > 0) go_on(stream);
}

static void finish(struct stream *stream) {
  stream->ending = true;
  if (!bytes_length(&stream->pending)) put_trailers(stream);
}

static size_t write_usage(uint8_t *at, unsigned field, unsigned tokens) {
  uint8_t usage[16] = {0x08, 0xfa, 0x01, 0x10}; /* 250 tokens of prompt */
  return write_bytes(at, field, usage, 4 + write_varint(usage + 4, tokens));
}

static size_t write_token_id(uint8_t *at, unsigned field, unsigned number) {
  uint8_t id[8];
  return write_bytes(at, field, id, write_varint(id, 20000 + number));
}

static void send_generated(struct stream *stream, bool last) {
  static const char header[] = "\x0a\x1creq-0123456789abcdef01234567\x12\x03m@1\x1a\x09simulated"
                               "\x20\x80\xf1\xc5\xd5\x06";
  static const char text[] = " tok";
  uint8_t message[256];
  size_t length = 0;
  if (stream->sent == 0) length = write_bytes(message, 1, header, sizeof header - 1);
  length += write_length(message + length, 2, STAMP_LENGTH + sizeof text - 1);
  write_stamp(message + length, now_ns());
  memcpy(message + length + STAMP_LENGTH, text, sizeof text - 1);
  length += STAMP_LENGTH + sizeof text - 1;
  length += write_token_id(message + length, 3, stream->sent);
  if (last) {
    message[length++] = 0x28; /* finish_reason: stop */
    message[length++] = 1;
    length += write_usage(message + length, 6, stream->sent + 1);
  }
  send_message(stream, message, length);
}

static void send_event(struct stream *stream, bool last) {
  uint8_t event[EVENT_MOST], tokens[16], message[EVENT_MOST + 128];
  size_t length = 0;
  if (stream->sent == 0) length = write_bytes(message, 1, SSE_TYPE, sizeof SSE_TYPE - 1);
  length += write_bytes(message + length, 2, event, write_event(event, last));
  /* ChoiceTokens of choice 0. */
  length += write_bytes(message + length, 3, tokens, write_token_id(tokens, 2, stream->sent));
  send_message(stream, message, length);
  if (!last) return;
  length = write_bytes(message, 2, SSE_DONE, sizeof SSE_DONE - 1);
  length += write_usage(message + length, 4, stream->sent + 1);
  send_message(stream, message, length);
}

static void send_whole(struct stream *stream) {
  unsigned tokens = stream->pace.tokens;
  static const char type[] = "application/json";
  char *document = need(malloc(DOCUMENT_MOST(tokens)));
  uint8_t *message = need(malloc(DOCUMENT_MOST(tokens) + 64));
  size_t length = write_bytes(message, 1, type, sizeof type - 1);
  length += write_bytes(message + length, 2, document, write_document(document, tokens));
  length += write_usage(message + length, 4, tokens);
  send_message(stream, message, length);
  free(document);
  free(message);
}

/* Sends the next token; ends the stream after the last. True when there is more to come. */
static bool step(struct stream *stream) {
  bool last = stream->sent + 1 == stream->pace.tokens;
  if (stream->method == GENERATE)
    send_generated(stream, last);
  else
    send_event(stream, last);
  stream->sent++;
  if (last) finish(stream);
  return !last;
}

static enum method method_of(const uint8_t *message, size_t length) {
  /* WatchReplicaRequest is empty or begins with a varint; the others with a text, which of
   * CallOpenAIRequest is a path. */
  if (length < 3 || message[0] != 0x0a) return WATCH;
  const uint8_t *at = message, *end = message + length;
  struct proto_field field;
  if (!next_field(&at, end, &field)) die("a malformed request");
  if (field.value == 0 || field.data[0] != '/') return GENERATE;
  return asks_to_stream(at, (size_t)(end - at)) ? OPENAI_STREAM : OPENAI_WHOLE;
}

static void answer(struct stream *stream) {
  struct connection *connection = stream->connection;
  const uint8_t *message = stream->request.data + stream->request.start + MESSAGE_HEAD;
  if (bytes_length(&stream->request) < MESSAGE_HEAD) die("a request without a message");
  size_t length = bytes_length(&stream->request) - MESSAGE_HEAD;
  stream->method = method_of(message, length);
  stream->pace = find_pace(message, length);
  put_headers(&connection->out, &connection->table, ANSWER, 2, 0, 0, stream->id);
  touch(connection);
  switch (stream->method) {
    case WATCH: {
      const struct bytes *watch = &connection->listener->watch;
      if (bytes_length(watch)) send_message(stream, watch->data, bytes_length(watch));
      break;
    }
    case OPENAI_WHOLE:
      send_whole(stream);
      finish(stream);
      break;
    default:
      if (stream->pace.pace_ns == 0) {
        while (step(stream)) continue;
        break;
      }
      stream->paced.due_ns = first_due_ns(&stream->pace);
      if (!stream->pace.together) {
        stream->paced.due_ns += stream->pace.pace_ns;
        if (!step(stream)) break;
      }
      heap_add(&due, &stream->paced);
  }
}

static void open_stream(struct connection *connection, uint32_t id) {
  struct stream *stream = need(calloc(1, sizeof *stream));
  stream->id = id;
  stream->connection = connection;
  stream->window = connection->stream_window;
  struct stream **at = find(connection, id);
  if (*at != NULL) die("stream %u is opened twice", id);
  *at = stream;
}

/* Calls go_on for every stream that waits, after a window has opened. */
static void go_on_all(struct connection *connection) {
  if (!connection->blocked) return;
  for (unsigned i = 0; i < BUCKETS; i++) {
    struct stream *next;
    for (struct stream *stream = connection->streams[i]; stream != NULL; stream = next) {
      next = stream->next;
      if (bytes_length(&stream->pending)) go_on(stream);
    }
  }
}

static void take_settings(struct connection *connection, const struct frame *frame) {
  for (uint32_t at = 0; at + 6 <= frame->length; at += 6) {
    unsigned setting = (unsigned)frame->payload[at] << 8 | frame->payload[at + 1];
    uint32_t value = read_u32(frame->payload + at + 2);
    if (setting == HEADER_TABLE_SIZE && value < 4096 && !connection->table.inserted)
      connection->table.absent = true;
    if (setting != INITIAL_WINDOW_SIZE) continue;
    int64_t change = (int64_t)value - connection->stream_window;
    connection->stream_window = value;
    for (unsigned i = 0; i < BUCKETS; i++)
      for (struct stream *stream = connection->streams[i]; stream; stream = stream->next)
        stream->window += change;
    go_on_all(connection);
  }
  put_ack(&connection->out, frame);
  touch(connection);
}

static void take_data(struct connection *connection, const struct frame *frame) {
  connection->unacknowledged += frame->length;
  if (connection->unacknowledged > CONNECTION_WINDOW / 4) {
    put_window_update(&connection->out, 0, connection->unacknowledged);
    connection->unacknowledged = 0;
    touch(connection);
  }
  struct stream *stream = *find(connection, frame->stream);
  if (stream != NULL) bytes_put(&stream->request, frame->payload, frame->length);
}

static void take_frame(struct connection *connection, const struct frame *frame) {
  struct stream **at;
  switch (frame->type) {
    case HEADERS:
      open_stream(connection, frame->stream);
      break;
    case DATA:
      take_data(connection, frame);
      break;
    case RST_STREAM:
      at = find(connection, frame->stream);
      if (*at != NULL) drop(at);
      return;
    case SETTINGS:
      if (!(frame->flags & ACK)) take_settings(connection, frame);
      return;
    case PING:
      if (!(frame->flags & ACK)) put_ack(&connection->out, frame);
      touch(connection);
      return;
    case WINDOW_UPDATE: {
      uint32_t count = read_u32(frame->payload) & 0x7fffffff;
      if (frame->stream == 0) {
        connection->window += count;
        go_on_all(connection);
        return;
      }
      at = find(connection, frame->stream);
      if (*at == NULL) return;
      (*at)->window += count;
      if (bytes_length(&(*at)->pending)) go_on(*at);
      return;
    }
    default:
      return;
  }
  if (frame->flags & END_STREAM) {
    struct stream *stream = *find(connection, frame->stream);
    if (stream != NULL) answer(stream);
  }
}

static void greet(struct connection *connection) {
  put_frame_head(&connection->out, 18, SETTINGS, 0, 0);
  put_setting(&connection->out, HEADER_TABLE_SIZE, table_bytes);
  put_setting(&connection->out, MAX_CONCURRENT_STREAMS, 1024);
  put_setting(&connection->out, INITIAL_WINDOW_SIZE, STREAM_WINDOW);
  put_window_update(&connection->out, 0, CONNECTION_WINDOW - DEFAULT_WINDOW);
  connection->greeted = true;
  touch(connection);
}

static void forget(struct connection *connection) {
  for (unsigned i = 0; i < BUCKETS; i++)
    while (connection->streams[i] != NULL) drop(&connection->streams[i]);
  close(connection->fd);
  connection->broken = true;
  touch(connection); /* It is freed where nothing points to it any more. */
}

static void receive(struct connection *connection) {
  if (connection->broken) return;
  ssize_t count = bytes_receive(&connection->in, connection->fd, RECEIVE_MOST);
  if (count < 0) {
    forget(connection);
    return;
  }
  if (!connection->greeted) {
    if (bytes_length(&connection->in) < PREFACE_LENGTH) return;
    connection->in.start += PREFACE_LENGTH;
    greet(connection);
  }
  struct frame frame;
  while (next_frame(&connection->in, &frame)) take_frame(connection, &frame);
}

static void accept_all(struct listener *listener) {
  int fd;
  while ((fd = accept(listener->fd, NULL, NULL)) >= 0) {
    struct connection *connection = need(calloc(1, sizeof *connection));
    make_prompt_socket(fd);
    connection->fd = fd;
    connection->listener = listener;
    connection->window = connection->stream_window = DEFAULT_WINDOW;
    poll_for(poller, EPOLL_CTL_ADD, fd, EPOLLIN, connection);
  }
}

static void flush_all(void) {
  while (dirty != NULL) {
    struct connection *connection = dirty;
    dirty = connection->next_dirty;
    connection->dirty = false;
    if (connection->broken) {
      bytes_free(&connection->in);
      bytes_free(&connection->out);
      free(connection);
      continue;
    }
    enum flush flushed = bytes_flush(&connection->out, connection->fd);
    if (flushed == BROKEN) {
      forget(connection);
      continue;
    }
    if ((flushed == BLOCKED) == connection->writing) continue;
    connection->writing = flushed == BLOCKED;
    uint32_t events = EPOLLIN | (connection->writing ? (uint32_t)EPOLLOUT : 0);
    poll_for(poller, EPOLL_CTL_MOD, connection->fd, events, connection);
  }
}

static void step_all_due(void) {
  uint64_t now = now_ns();
  while (heap_next_ns(&due) <= now) {
    struct stream *stream = (struct stream *)due.items[1];
    heap_remove(&due, &stream->paced);
    stream->paced.due_ns += stream->pace.pace_ns;
    if (step(stream)) heap_add(&due, &stream->paced);
  }
}

static void read_file(struct bytes *into, const char *path) {
  FILE *file = fopen(path, "rb");
  size_t count;
  if (file == NULL) die("cannot read %s", path);
  while ((count = fread(bytes_reserve(into, 4096), 1, 4096, file)) > 0) into->end += count;
  fclose(file);
}

/* PORT[,REPLICA[,FILE]] */
static struct listener *listen_as(const char *text) {
  struct listener *listener = need(calloc(1, sizeof *listener));
  char *parts = need(strdup(text)), *rest = parts;
  const char *port = strsep(&rest, ","), *replica = strsep(&rest, ",");
  listener->fd = listen_on(atoi(port));
  listener->replica = replica != NULL ? replica : "r";
  if (rest != NULL) read_file(&listener->watch, rest);
  return listener;
}

int main(int count, char **arguments) {
  struct listener *listeners[64];
  size_t listening = 0;
  struct epoll_event events[256];
  signal(SIGPIPE, SIG_IGN);
  poller = epoll_create1(0);
  table_bytes = (uint32_t)atoi(option(count, arguments, "table", "0"));
  for (int i = 1; i < count && listening < 64; i++) {
    if (strncmp(arguments[i], "listen=", 7) != 0) continue;
    listeners[listening] = listen_as(arguments[i] + 7);
    poll_for(poller, EPOLL_CTL_ADD, listeners[listening]->fd, EPOLLIN, listeners[listening]);
    listening++;
  }
  puts("ready");
  fflush(stdout);
  for (;;) {
    int ready = wait_events(poller, events, 256, heap_next_ns(&due));
    for (int i = 0; i < ready; i++) {
      void *owner = events[i].data.ptr;
      struct listener *listener = NULL;
      for (size_t k = 0; k < listening; k++)
        if (owner == listeners[k]) listener = listeners[k];
      if (listener != NULL) {
        accept_all(listener);
        continue;
      }
      struct connection *connection = owner;
      if (events[i].events & EPOLLOUT) touch(connection);
      if (events[i].events & (EPOLLIN | EPOLLHUP | EPOLLERR)) receive(connection);
    }
    step_all_due();
    flush_all();
  }
}
