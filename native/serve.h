/* What the files of PID 1 share. One thread, one epoll loop, one `srv`. */
#ifndef WF_SERVE_H
#define WF_SERVE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "buffer.h"
#include "frame.h"
#include "ring.h"
#include "supervisor.h"
#include "wf.h"

enum {
	MAX_CONNS = 256,
	MAX_COMMANDS = 1024,       /* with a live process */
	MAX_ENDED = 256,           /* ended KEEP commands that LIST still shows */
	QUEUE_HIGH = 256 * 1024,   /* above it a connection gets no more output */
	QUEUE_LOW = 128 * 1024,    /* below it it does again */
	QUEUE_STUCK = 1024 * 1024, /* above it its requests are not read either */
	STDIN_LIMIT = 2 * WF_STDIN_CREDIT,
	ARGV_SHOWN = 4096, /* bytes of argv that LIST remembers */
};

/* What epoll hands back. Lives as long as its descriptor is registered, and
 * until the end of the round in which it was taken out. */
struct source {
	void (*ready)(struct source *source, uint32_t events);
};

struct conn {
	struct source source;
	int fd;
	bool owner, closing, dirty, hung_up;
	uint32_t armed; /* the events asked of epoll; 0: not registered */
	struct buffer in, out;
	int fds[4]; /* to go with the byte at fds_at of `out` */
	int n_fds;
	size_t fds_at;
	struct channel *channels;
	struct conn *next;
};

/* One client's view of one command. */
struct channel {
	struct conn *conn;
	uint32_t id;
	struct command *command;
	uint64_t credit;
	uint64_t credit_ms; /* when credit last came */
	bool starter;       /* made by EXEC, not by ATTACH */
	bool quiet, follow, told_start;
	uint64_t cursor[2], until[2]; /* KEEP: places in the rings */
	struct channel *next_in_conn, *next_in_command;
};

enum command_state {
	COMMAND_QUEUED,   /* held */
	COMMAND_STARTING, /* forked, not yet known to run */
	COMMAND_RUNNING,
	COMMAND_ENDED, /* the process ended; its output is being drained */
	COMMAND_DONE,  /* EXIT can be told; what lingers is in the background */
};

struct stream {
	struct source source;
	struct command *command;
	int fd; /* -1: at its end */
	int index;
	bool armed;
	bool slow;                       /* wait for the next tick before reading again */
	bool empty;                      /* the last read found nothing */
	uint64_t late_bytes, late_limit; /* read after the drain time passed */
	struct ring ring;
};

struct input {
	struct source source;
	int fd; /* -1: none or closed */
	bool armed, eof, tty, broken;
	struct channel *claim;
	struct buffer queue;
	uint32_t owed; /* credit not yet given back */
};

struct command {
	struct source control; /* the supervisor's socket */
	int control_fd;
	pid_t supervisor; /* 0 once reaped */
	pid_t pid;
	enum command_state state;
	uint32_t flags, drain_ms;
	uint64_t timeout_ms;
	struct stream out[2];
	struct input in;
	uint64_t timeout_at, drain_at, kill_at; /* monotonic ms, 0 none */
	bool killed;                            /* the tree is being killed */
	enum wf_reason killed_for;
	bool drained;
	bool reported; /* the supervisor told how it ended */
	enum wf_reason reason;
	int32_t exit_code, signal;
	struct usage usage;
	uint64_t oom_before;
	uint64_t started_us, started_unix_ms, ended_unix_ms;
	uint32_t argc_shown;
	uint8_t *argv_shown; /* packed str, as LIST sends them */
	size_t argv_shown_len;
	struct exec_request request; /* while queued */
	uint8_t *payload;            /* owned while queued */
	size_t payload_len;
	struct channel *channels;
	struct command *next;
	bool buried;
};

struct server {
	const struct wf_init_config *config;
	int epoll_fd, signal_fd;
	int owner_pidfd, listen_fd, lock_fd, oom_fd;
	int freeze_fd, freeze_state_fd;
	struct kept kept; /* descriptors that a supervisor needs too */
	uint64_t started_ms, ends_ms;
	uint64_t wake_ms; /* the next thing that time brings, UINT64_MAX none */
	struct conn *conns;
	unsigned n_conns;
	struct command *commands; /* newest first */
	bool strays;
	uint64_t strays_ms, tick_ms, listen_ms;
	unsigned strays_wait_ms;
	uint64_t reaped_cpu_us;
	size_t queued_bytes;
};

extern struct server srv;

/* init.c */
uint64_t now_ms(void);
uint64_t now_us(void);
uint64_t unix_ms(void);
void wake_at(uint64_t ms);
bool watch(int fd, struct source *source, uint32_t events);
void unwatch(int fd);
void release_later(void *memory); /* free() at the end of the round */
void end_sandbox(int code) __attribute__((noreturn));

/* serve.c: connections */
void conn_open(int fd, bool owner);
void conn_close(struct conn *conn);
uint8_t *conn_room(struct conn *conn, size_t n); /* n bytes at the end of the queue, or NULL */
void conn_commit(struct conn *conn, size_t n);
void conn_send(struct conn *conn, uint16_t type, uint32_t channel, const void *payload, size_t len);
void conn_error(struct conn *conn, uint32_t channel, int error, const char *format, ...)
	__attribute__((format(printf, 4, 5)));
bool conn_has_room(const struct conn *conn);
int conns_listen(void);
void conns_time(uint64_t now);
void conns_flush(void);
struct channel *conn_channel(struct conn *conn, uint32_t id);

/* request.c: one frame; false: malformed */
bool request_handle(struct conn *conn, struct frame *frame);

/* facts.c: answers */
void facts_list(struct conn *conn, uint32_t channel);
void facts_info(struct conn *conn, uint32_t channel);
void facts_account(struct conn *conn, uint32_t channel);
void facts_nsfds(struct conn *conn, uint32_t channel);
uint64_t oom_kills(void);
unsigned processes_inside(void);
unsigned commands_running(void);

/* hold.c: hold_active() is true while frozen, too */
bool hold_active(void);
unsigned hold_count(void);
void hold_request(struct conn *conn, uint32_t channel, uint32_t ttl_ms);
void hold_release(struct conn *conn, uint32_t channel);
void hold_forget(struct conn *conn);
void hold_time(uint64_t now);

/* freeze.c */
enum freeze_state { FREEZE_NONE, FREEZE_WAITING, FREEZE_GOING, FREEZE_DONE };
enum freeze_state freeze_state(void);
bool freeze_active(void);
void freeze_request(struct conn *conn, uint32_t channel);
void freeze_thaw(struct conn *conn, uint32_t channel);
void freeze_undo(void);
void freeze_forget(struct conn *conn);
void freeze_time(uint64_t now);

/* shutdown.c */
bool shutdown_active(void);
void shutdown_request(struct conn *conn, uint32_t channel, uint32_t grace_ms);
void shutdown_forget(struct conn *conn);
void shutdown_time(uint64_t now);

/* mapped.c */
void mapped_request(struct conn *conn, uint32_t channel);
void mapped_forget(struct conn *conn);
bool mapped_reaped(pid_t pid);
pid_t mapped_worker(void);

/* command.c: the life of one */
void command_ended(struct command *command);
void command_not_started(struct command *command, int error, const char *text);
void command_forget_request(struct command *command);
void command_settle(struct command *command);
void command_exit_frame(struct channel *channel);
void command_time(uint64_t now);
void command_shift(uint64_t ms); /* moves the time limits, after a freeze */
struct command *command_by_pid(uint32_t pid);
struct command *command_by_supervisor(pid_t pid);

/* control.c: its supervisor */
void command_on_control(struct source *source, uint32_t events);
void command_reaped(struct command *command, int status);
void command_kill(struct command *command, enum wf_reason reason);
void command_signal(struct command *command, int signo, bool tree);

/* admit.c */
void command_exec(struct conn *conn, struct frame *frame, struct exec_request *request);
void command_start_queued(void);

/* spawn.c */
void command_launch(struct command *command, struct exec_request *request);

/* channel.c */
struct channel *channel_new(struct conn *conn, uint32_t id, struct command *command);
void channel_free(struct channel *channel);
void channel_close(struct channel *channel); /* DETACH, or its connection ended */
void channel_attach(struct conn *conn, uint32_t id, uint32_t pid, uint32_t credit, uint32_t flags);
void channel_credit(struct channel *channel, uint32_t bytes);
void channel_pump(struct channel *channel); /* KEEP: sends what the rings hold */
void channel_resume(struct channel *channel);
bool channel_holds_up(const struct channel *channel, const struct stream *stream, uint64_t now);

/* stream.c: output of a command */
void stream_open(struct command *command, int index, int fd);
void stream_close(struct stream *stream);
void stream_read(struct stream *stream, unsigned rounds);
void stream_resume(struct stream *stream);
void stream_last_call(struct stream *stream);
bool stream_finished(const struct stream *stream);
void stream_resize(struct stream *stream, uint16_t rows, uint16_t cols);

/* input.c: its stdin */
void input_open(struct command *command, int fd, bool tty);
bool input_put(struct channel *channel, const uint8_t *data, size_t len, bool eof);
void input_flush(struct command *command);
void input_close(struct input *input);

/* stray.c: what a dead supervisor left to PID 1 */
void strays_begin(void);
void strays_time(uint64_t now);
bool is_known_child(pid_t pid);

#endif
