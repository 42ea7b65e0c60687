/* Asks for `Generate` of forebay.inference.v1 over a few HTTP/2 connections, and times the tokens.
 *
 *   grpc_load [connections=N] [model=NAME] and the options of load.h
 *
 * Tokens are counted by their ids, so answers without stamps are counted, too. A request that ends
 * with another number of tokens than it asked for is an error.
 */
#include "h2.h"
#include "load.h"

#define BUCKETS 256
#define RECEIVE_MOST (256u << 10)
#define STREAM_WINDOW (1u << 20)
#define CONNECTION_WINDOW (64u << 20)

struct stream {
  uint32_t id;
  struct connection *connection;
  struct stream *next;
  uint64_t asked_ns;
  unsigned tokens;
  struct bytes part; /* The beginning of a message whose end has not come yet. */
  struct stream *next_waiting;
};

struct connection {
  int fd;
  struct bytes in, out;
  struct stream *streams[BUCKETS];
  struct header_table table;
  int64_t window;
  uint32_t peer_stream_window;
  uint32_t next_id, unacknowledged;
  bool has_settings, dirty, writing;
  struct connection *next_dirty;
  struct stream *waiting; /* Streams without room in the window for their request. */
};

static struct load load;
static const char *model;
static int poller;
static struct connection *dirty;

static const struct field REQUEST[] = {
    {.static_field = 3}, /* :method POST */
    {.static_field = 6}, /* :scheme http */
    {4, ":path", "/forebay.inference.v1.InferenceService/Generate", 0},
    {1, ":authority", "localhost", 0},
    {0, "te", "trailers", 0},
    {31, "content-type", "application/grpc", 0},
    {58, "user-agent", "grpc-c/44.0.0 (linux; bench)", 0},
    {0, "grpc-timeout", "60S", 0},
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

static size_t write_request(uint8_t *at) {
  static char *prompt;
  uint8_t sampling[16] = {0x08}; /* max_tokens */
  if (prompt == NULL) prompt = need(malloc(PROMPT_MOST(&load)));
  size_t length = write_bytes(at, 1, model, strlen(model));
  length += write_bytes(at + length, 2, prompt, write_prompt(&load, prompt));
  size_t options = 1 + write_varint(sampling + 1, load.tokens);
  sampling[options++] = 0x58; /* ignore_eos */
  sampling[options++] = 1;
  return length + write_bytes(at + length, 5, sampling, options);
}

static void ask(struct stream *stream) {
  static uint8_t *message;
  struct connection *connection = stream->connection;
  if (message == NULL) message = need(malloc(PROMPT_MOST(&load) + 512));
  size_t length = write_request(message), count = length + MESSAGE_HEAD;
  if (count > connection->peer_stream_window || count > FRAME_MOST)
    die("a request of %zu bytes does not fit", count);
  if (!connection->has_settings || connection->window < (int64_t)count) {
    stream->next_waiting = connection->waiting;
    connection->waiting = stream;
    return;
  }
  connection->window -= (int64_t)count;
  stream->id = connection->next_id;
  connection->next_id += 2;
  stream->tokens = 0;
  stream->part.start = stream->part.end = 0;
  struct stream **bucket = &connection->streams[(stream->id >> 1) % BUCKETS];
  stream->next = *bucket;
  *bucket = stream;
  put_headers(&connection->out, &connection->table, REQUEST, sizeof REQUEST / sizeof *REQUEST, 0,
              0, stream->id);
  put_frame_head(&connection->out, count, DATA, END_STREAM, stream->id);
  uint8_t head[MESSAGE_HEAD] = {0};
  write_u32(head + 1, (uint32_t)length);
  bytes_put(&connection->out, head, MESSAGE_HEAD);
  bytes_put(&connection->out, message, length);
  stream->asked_ns = now_ns();
  touch(connection);
}

static void ask_waiting(struct connection *connection) {
  struct stream *waiting = connection->waiting, *next;
  connection->waiting = NULL;
  for (; waiting != NULL; waiting = next) {
    next = waiting->next_waiting;
    ask(waiting);
  }
}

/* Takes a stream that has ended out of the table and asks again. */
static void end(struct stream *stream, const char *problem, const struct frame *frame) {
  struct stream **at = find(stream->connection, stream->id);
  *at = stream->next;
  if (problem == NULL && stream->tokens != load.tokens) problem = "an answer of another length";
  if (problem != NULL)
    count_error(&load, problem, frame->payload, frame->length);
  else
    count_request(&load, stream->asked_ns);
  ask(stream);
}

/* Counts the tokens of one GenerateResponse. */
static void take_message(struct stream *stream, const uint8_t *message, size_t length,
                         uint64_t now) {
  const uint8_t *at = message, *end_of_message = message + length;
  struct proto_field field;
  uint64_t sent_ns = 0;
  unsigned tokens = 0;
  while (next_field(&at, end_of_message, &field)) {
    if (field.number == 2 && field.wire_type == 2 && field.value >= STAMP_LENGTH)
      sent_ns = read_stamp(field.data);
    if (field.number == 3 && field.wire_type == 2)
      for (uint64_t i = 0; i < field.value; i++) tokens += field.data[i] < 128;
  }
  if (tokens == 0) return;
  if (stream->tokens == 0) count_first(&load, now, stream->asked_ns, sent_ns);
  stream->tokens += tokens;
  for (unsigned i = 0; i < tokens; i++) count_token(&load, now, sent_ns);
}

/* Takes whole messages out of `at` and returns how many bytes they were. */
static size_t take_messages(struct stream *stream, const uint8_t *at, size_t count,
                            uint64_t now) {
  size_t taken = 0;
  while (count - taken >= MESSAGE_HEAD) {
    size_t length = read_u32(at + taken + 1);
    if (count - taken < MESSAGE_HEAD + length) break;
    take_message(stream, at + taken + MESSAGE_HEAD, length, now);
    taken += MESSAGE_HEAD + length;
  }
  return taken;
}

static void take_data(struct connection *connection, struct stream *stream,
                      const struct frame *frame, uint64_t now) {
  connection->unacknowledged += frame->length;
  if (connection->unacknowledged > CONNECTION_WINDOW / 4) {
    put_window_update(&connection->out, 0, connection->unacknowledged);
    connection->unacknowledged = 0;
    touch(connection);
  }
  if (stream == NULL) return;
  struct bytes *part = &stream->part;
  if (bytes_length(part)) {
    bytes_put(part, frame->payload, frame->length);
    part->start += take_messages(stream, part->data + part->start, bytes_length(part), now);
    return;
  }
  size_t taken = take_messages(stream, frame->payload, frame->length, now);
  if (taken < frame->length) bytes_put(part, frame->payload + taken, frame->length - taken);
}

static void take_settings(struct connection *connection, const struct frame *frame) {
  for (uint32_t at = 0; at + 6 <= frame->length; at += 6) {
    unsigned setting = (unsigned)frame->payload[at] << 8 | frame->payload[at + 1];
    uint32_t value = read_u32(frame->payload + at + 2);
    if (setting == HEADER_TABLE_SIZE && value < 4096) connection->table.absent = true;
    if (setting == INITIAL_WINDOW_SIZE) connection->peer_stream_window = value;
    if (setting == MAX_CONCURRENT_STREAMS && value < 100)
      die("only %u streams are allowed per connection", value);
  }
  put_ack(&connection->out, frame);
  touch(connection);
  connection->has_settings = true;
  ask_waiting(connection);
}

static void take_frame(struct connection *connection, const struct frame *frame, uint64_t now) {
  struct stream *stream = frame->stream ? *find(connection, frame->stream) : NULL;
  switch (frame->type) {
    case DATA:
      take_data(connection, stream, frame, now);
      break;
    case HEADERS:
      break;
    case RST_STREAM:
      if (stream != NULL) end(stream, "a stream was reset", frame);
      return;
    case SETTINGS:
      if (!(frame->flags & ACK)) take_settings(connection, frame);
      return;
    case PING:
      if (!(frame->flags & ACK)) put_ack(&connection->out, frame);
      touch(connection);
      return;
    case GOAWAY:
      die("the connection is to end: %.*s", (int)frame->length - 8, frame->payload + 8);
    case WINDOW_UPDATE:
      /* A stream sends one small request, so its own window never matters. */
      if (frame->stream == 0) {
        connection->window += read_u32(frame->payload) & 0x7fffffff;
        ask_waiting(connection);
      }
      return;
    default:
      return;
  }
  if (frame->flags & END_STREAM && stream != NULL) end(stream, NULL, frame);
}

static void receive(struct connection *connection) {
  if (bytes_receive(&connection->in, connection->fd, RECEIVE_MOST) < 0)
    die("a connection was closed");
  uint64_t now = now_ns();
  struct frame frame;
  while (next_frame(&connection->in, &frame)) take_frame(connection, &frame, now);
}

static void flush_all(void) {
  while (dirty != NULL) {
    struct connection *connection = dirty;
    dirty = connection->next_dirty;
    connection->dirty = false;
    enum flush flushed = bytes_flush(&connection->out, connection->fd);
    if (flushed == BROKEN) die("a connection was closed");
    if ((flushed == BLOCKED) == connection->writing) continue;
    connection->writing = flushed == BLOCKED;
    uint32_t events = EPOLLIN | (connection->writing ? (uint32_t)EPOLLOUT : 0);
    poll_for(poller, EPOLL_CTL_MOD, connection->fd, events, connection);
  }
}

static void open_connection(struct connection *connection) {
  connection->fd = connect_to(load.port);
  connection->window = connection->peer_stream_window = DEFAULT_WINDOW;
  connection->next_id = 1;
  bytes_text(&connection->out, PREFACE);
  put_frame_head(&connection->out, 12, SETTINGS, 0, 0);
  put_setting(&connection->out, HEADER_TABLE_SIZE, 4096);
  put_setting(&connection->out, INITIAL_WINDOW_SIZE, STREAM_WINDOW);
  put_window_update(&connection->out, 0, CONNECTION_WINDOW - DEFAULT_WINDOW);
  poll_for(poller, EPOLL_CTL_ADD, connection->fd, EPOLLIN, connection);
  touch(connection);
}

int main(int count, char **arguments) {
  struct epoll_event events[256];
  signal(SIGPIPE, SIG_IGN);
  load_read(&load, count, arguments);
  unsigned connected = (unsigned)atoi(option(count, arguments, "connections", "1"));
  model = option(count, arguments, "model", "m");
  poller = epoll_create1(0);
  struct connection *connections = need(calloc(connected, sizeof *connections));
  struct stream *streams = need(calloc(load.streams, sizeof *streams));
  for (unsigned i = 0; i < connected; i++) open_connection(&connections[i]);
  load.began_ns = now_ns();
  while (!load_is_over(&load)) {
    while (load_may_start(&load)) {
      struct stream *stream = &streams[load.started];
      stream->connection = &connections[load.started++ % connected];
      ask(stream);
    }
    flush_all();
    int ready = wait_events(poller, events, 256, load_next_ns(&load));
    for (int i = 0; i < ready; i++) {
      struct connection *connection = events[i].data.ptr;
      if (events[i].events & EPOLLOUT) touch(connection);
      if (events[i].events & (EPOLLIN | EPOLLHUP | EPOLLERR)) receive(connection);
    }
    flush_all();
  }
  load_print(&load);
  return 0;
}
